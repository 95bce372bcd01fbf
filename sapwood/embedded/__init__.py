"""Sapwood inside a program: the services as its child processes. Knows no verb."""
