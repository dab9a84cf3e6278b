"""Loading of a safetensors checkpoint into the slots of a rank: names, plan, load."""
