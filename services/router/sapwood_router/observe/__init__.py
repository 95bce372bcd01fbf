"""Metrics, spans and the state shown to operators. Looks at all the rooms below the flow, changes nothing."""
