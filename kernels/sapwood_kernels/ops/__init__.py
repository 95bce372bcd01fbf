"""A device's operations: one object for each kind of device, chosen once, so that layers do not depend on the device."""
