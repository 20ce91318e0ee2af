"""The demonstration: the whole loop on one machine, with a kill and a late arrival."""
