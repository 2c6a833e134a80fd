"""Training that keeps only the updates that pass a noisy test (DPSUR), for every Keras."""
