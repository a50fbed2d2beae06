"""What a run reports about itself: metrics.jsonl and TensorBoard, progress lines, time spans, plots."""
