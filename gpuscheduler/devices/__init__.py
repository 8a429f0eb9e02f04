"""The hardware: threads of the CPU, and GPUs.

cpu     Devices made of host threads: the default on a machine without GPUs.
choose  The hardware that a device string names.
cuda/   GPUs, driven through CuPy.
"""
