"""What a device computes with: one object for each kind of device, chosen once, so that no layer asks what it runs on."""
