"""Adapters (LoRA): read from files, kept on the host, and put into slots of the device."""
