"""The command line.

top           What the schedulers of this user do now, read from their snapshots.
workload      Workloads of the command line: names, files, sizes and timings.
report        Tables, figures and texts that the command line prints.
commands      The commands: show devices, run a workload, print its plan, measure it.
command_line  The command line: commands, their options and their help.
"""
