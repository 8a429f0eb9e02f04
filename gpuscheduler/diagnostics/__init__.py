"""What users see of their runs: progress, explanations, reports, pages.

log    Loggers of the package: who writes what at which level.
"""
