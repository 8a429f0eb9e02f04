"""What users see of their runs: progress, explanations, reports, pages.

log         Loggers of the package: who writes what at which level.
progress    Show how far runs are: in a terminal, in a notebook, or in the log.
trace_json  When steps and copies ran, as a file for Perfetto.
advice      Rules that say what would make a computation faster.
explain     A computation on one page: layers, kernels, costs, advice.
memory      What fills memory: values at the peak, persisted collections.
svg         Lanes of bars and step lines as SVG.
report      A report of what ran, as one file.
recording   What was recorded while a `with` block ran.
"""
