"""vLLM: its plug-in, maps, policy and communicator."""
