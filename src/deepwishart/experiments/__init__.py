"""The paper: its figures and, in time, its runs and tables."""
