"""The K3 architecture on one device."""
