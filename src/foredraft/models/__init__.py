"""Models: loading checkpoints, and running transformers' decoders and MTP modules over paged rows."""
