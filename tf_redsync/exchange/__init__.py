"""The exchange: requests, layout, wire format, networks, and state."""
