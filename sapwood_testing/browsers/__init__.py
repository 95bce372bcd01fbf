"""Headless browsers, driven by the tests of the router's page."""
