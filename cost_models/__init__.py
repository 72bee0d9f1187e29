"""Numbers: what operations cost in FLOPs and bytes, and in seconds on a device.

flops        conv -> 4.1 G*s FLOPs, 2.6 M*s bytes        by `formulas`, or `counted` by running it on meta tensors
roofline     FLOPs and bytes -> seconds                  `devices` by name; `calibrate` times the machine at hand
profiled     seconds as measured, of one model           `profile_files` keeps them
"""
