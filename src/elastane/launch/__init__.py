"""The supervisor: launcher, agents and the coordinator. Imports nothing that trains."""
