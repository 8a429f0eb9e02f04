"""GPUs, driven through CuPy.

copies            Copies between arrays on devices, and of results into one array.
pickling          Pickle CuPy's kernels by their source instead of their loaded module.
random_generator  A generator of one block's random numbers, for those without a closed form.
staging_loops     The Numba loop of `staging`.
staging           Copy pageable host arrays to a device through small pinned buffers.
dask_backend      Complete Dask's CuPy backend by registration with Dask.
numpy_fallback    Run tasks written for NumPy that CuPy refuses, with copied arguments.
nvml              What NVML tells of the GPUs: memory, utilisation, power, clocks, NVLink.
ranges            NVTX ranges around launches, for profilers that are attached.
launch            What a launch needs: pointers, workspace, and kernels ready to be queued.
kernel_code       Compile kernels once per structure, and load them once per device.
kernels           Launch the kernels of tasks, each with one argument.
random_kernels    Draw blocks of random numbers as CuPy arrays, for other schedulers.
result_rooms      Result rooms: the memory of a whole result, into which steps write their blocks.
arrays            CuPy arrays and containers of them: bytes, order, and copies on the host.
replay            Replay a launch tape: kernels, arrays and addresses in one table.
lane              One device's place in a team: its streams, events and what it holds.
pinned            Pinned host memory, reused in blocks, slabs and pieces.
recorder          Record the launches of a run, to replay them.
links             How fast devices reach each other and the host, tried once.
library_calls     Call CuPy's functions for NumPy's and SciPy's, as these are.
run_context       What the parts of one run on GPUs share: plan, lanes, values and events.
task_launch       Launch one task on one device: by its kernels, by cuBLAS, or by calling it.
caller_order      Order the work of a run behind its caller's, and the caller's behind it.
given_values      Take the values that the graph brings along.
host_steps        Compute steps on the host, where CuPy refuses them.
step_values       Compute the value of one step on its device.
transfers         Copy values between devices, to the host and on to the disk.
file_steps        Run steps that read and write files, and send host arrays to devices.
allocations       Meter what a step allocates, by the user's line that does it.
marks             When steps and copies ran, by the clocks of the GPUs.
lane_orders       Carry out orders to devices: launch steps, copy and free values.
run_values        Hand out the values of a run's outputs, from wherever they lie.
tape_run          Queue a run from its launch tape.
executor          Run plans on GPUs: a worker thread and long-lived streams for each device.
block_joiner      Join the blocks of a result to one array, on a device or on the host.
hardware          The GPUs of a machine: links, memory limits, and what outlives a run.
"""
