"""What tests of speculation share: a drafter with a dial, and requests whose answers must be the same with drafts and without."""
