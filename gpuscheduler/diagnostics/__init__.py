"""What users see of their runs: progress, explanations, reports, pages.

text        Columns, tables, plurals and files of the pages.
colours     Colours of pages and pictures.
log         Loggers of the package: who writes what at which level.
progress    Show how far runs are: in a terminal, in a notebook, or in the log.
lanes       What each device did in the latest seconds, in bins.
snapshot_file Files of snapshots: where they are, how they are written and read.
snapshot    What a scheduler does now, for other processes to read.
headline    What a snapshot says in a few words.
metrics     Prometheus metrics, read when they are scraped.
serve       Start the live page: a child process that draws what snapshots say.
page        The live page, drawn by Bokeh; it runs in a process of its own.
trace_json  When steps and copies ran, as a file for Perfetto.
advice      Rules that say what would make a computation faster.
explain     A computation on one page: layers, kernels, costs, advice.
memory      What fills memory: values at the peak, persisted collections.
svg         Lanes of bars and step lines as SVG.
report      A report of what ran, as one file.
recording   What was recorded while a `with` block ran.
observed    What a scheduler shows of its runs: recordings, explanations, persisted memory.
"""
