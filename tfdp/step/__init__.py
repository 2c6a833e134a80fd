"""The private step, which both Kerases share: clip, add noise, count the release."""
