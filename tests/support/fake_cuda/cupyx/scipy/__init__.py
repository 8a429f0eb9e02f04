"""SciPy for the stand-in's arrays."""
