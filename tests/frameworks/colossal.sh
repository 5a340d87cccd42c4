#!/bin/bash
export OMP_NUM_THREADS=8
colossalai run --nproc_per_node 8 --hostfile hosts.txt benchmark.py -c 70b -p 3d --tp 8 --pp 4 --zero 1 -g -x -b 8 --mbs 1 -l 4096
