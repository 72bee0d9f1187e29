"""What users hand in, made into one training step whose forward returns the loss.

    UNet2DConditionModel    ->    PredictionStep: mse(unet(sample, timestep, ...), target), inputs from the config

backbones            a bare diffusers model as a step    backbone_inputs    what its arguments mean
self_conditioning    a first pass in some of the steps
pipelines            which part of one predicts; others in its place    pipeline_steps    the training step of one
"""
