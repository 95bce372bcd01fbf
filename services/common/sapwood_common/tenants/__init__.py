"""API keys and the tenants behind them. Knows no service and no transport."""
