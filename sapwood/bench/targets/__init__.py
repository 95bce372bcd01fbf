"""Servers that are asked, and what came back of each request. Knows neither where requests come from nor when."""
