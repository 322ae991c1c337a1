"""What the tables' drivers share: training one task once, the ledger of runs, runs side by side."""
