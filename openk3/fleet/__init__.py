"""The router before a fleet of servers: where each request goes, what waits, and what happens when a server dies."""
