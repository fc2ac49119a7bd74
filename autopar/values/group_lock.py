"""Who may use torch.distributed now? Capturing a model replaces what it answers (`capture.one_process`), and a save
beside training asks it from a thread (`runtime.saving`): each waits for the other."""

import threading

GROUP_LOCK = threading.RLock()
