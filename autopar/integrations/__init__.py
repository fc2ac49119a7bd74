"""How does a planned model enter the loop of a framework that people use? One file a framework."""
