"""What does this cluster really do? Measurements on a process group, fits of them, and a cluster file to plan with."""
