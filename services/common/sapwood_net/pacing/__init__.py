"""What is counted or spent over time: rates, sliding counts, silences, turns."""
