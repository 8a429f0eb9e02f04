"""A plan carried out: decisions, the loop, memory, spilling, simulated devices.

pools           Thread and process pools that callers hand to a computation.
admission       Admission control: which runs may be under way at the same time.
dask_config     Override Dask's configuration while a scheduler is in use, and restore it.
events          Instructions that `State` gives and events that it is told.
gather          Assemble a result: each device writes its blocks into one host array.
host_memory     Memory of this process, and how unused memory goes back to the system.
persisted       The registry of persisted chunks: where each is, and which run may move it.
spill           The spill store: evicted values in files, one for each.
state           Decide what to do next: events in, instructions out.
tape            Launch tapes: the orders of a run that needs no decisions.
allocations     What one step allocates, by the line that does it.
under_way       The runs under way in this process, for displays of their progress.
observe         What runs did: one recording, from which everything is fed.
protocol        What the loop asks of devices and of hardware.
dask_callbacks  Run Dask's callbacks (progress bar, profilers, cache) around a run.
loop            The run loop: instructions go to devices, their events to `State`.
simulated       Simulated devices: values in order, values in any order, or only a clock.
threads         Worker threads that run what they are sent, in order.
"""
