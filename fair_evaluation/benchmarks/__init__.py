"""Readers of the public benchmarks with answer positions, which the MTEB tasks and the PyTerrier datasets share."""
