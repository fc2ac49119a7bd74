"""Which configuration of a framework trains a transformer fastest on a cluster? All it can express, priced, ranked."""
