"""How long commands and jobs take to start."""
