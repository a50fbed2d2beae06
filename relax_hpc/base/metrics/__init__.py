"""Reports of a run about itself: metrics.jsonl and TensorBoard, progress lines, time spans,
plots."""
