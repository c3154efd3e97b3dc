"""A real model, real conversations, every stage: the whole job on a laptop's CPU."""
