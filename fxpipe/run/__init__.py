"""Running: rank programs on a transport, as threads of one process or as one process per rank.

    engine.step(batch)    rank 0: run_rank(program, transport)  --- messages --->  rank 1: run_rank(program, transport)
                                  |                                                        |
                          loss, .grad of its parameters                            loss, .grad of its parameters

engine         this process as one rank (local_engine: all ranks)      training       steps over batches (read_ahead)
trained_model  its parameters, as engines offer them                   saves          a run on the disk, and back
run_rank       one step of one rank                                    transport      threads, torch.distributed
launch         which rank this process is; the plan of rank 0          observe        events of a run
engine_data    a rank's own samples (loader, local_batch)              shared_samples   samples that several ranks read
shared_model   one model, trained on several ranks (ownership)         agreement      what ranks must have alike
engine_base    what the parts of engines share                         accumulation   gradients of several batches
host_states    optimizers whose states are on the host                 state_updates  what forward writes into its model
step_outputs   what a step returns beside the loss                     kinds          batches of several shapes
verification   a step against the uncompiled model (one_device), in low precision by its nearness to float32
scaler         scaled losses of float16, with one verdict on overflows
"""
