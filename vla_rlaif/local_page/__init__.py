"""What the local pages share (labelling, inspection): who may use them, the headers of their answers, clips as
pictures."""
