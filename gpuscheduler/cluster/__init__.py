"""Computing on a Dask cluster: stages, transport, worker plug-in, simulation.

stages         Partition a graph into stages, each of which one worker can run alone.
wire           Values on their way between workers, as they travel.
cuda_ipc       Arrays on GPUs that other processes of this machine read in place, through CUDA IPC.
simulate       Predict time, traffic and memory of a computation on a cluster that does not exist.
transport      The wire format of values that travel between processes in one parcel.
gpu_page       The page of a cluster's dashboard that shows every device of every worker.
answer         What a computation on a cluster gives its caller.
progress       How many tasks of a run on a cluster are done, as Dask's callbacks look at it.
worker_plugin  The plug-in that gives a cluster's worker a `Scheduler`, and the tasks that use it.
submit         Turn a partitioned graph into tasks of a Dask cluster.
membership     Which workers take part in an attachment, and what they tell of themselves.
observed       What a cluster shows of its runs: timelines and reports of all workers.
attach         Attach to a Dask cluster whose workers each drive all devices of their node.
"""
