cd /tmp/wt/text && PYTHONPATH=/tmp/wt/text OMP_NUM_THREADS=1 nice -n 2 /work/main/.venv/bin/python -m pytest -x -q -p no:cacheprovider -p no:randomly "$@" 2>&1 | tail -15
