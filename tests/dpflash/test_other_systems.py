"""The library runs where Python lacks names that Linux has: on Windows and macOS."""

import subprocess
import sys
from pathlib import Path

import pytest

# Imported first: torch and numpy are other builds there.
SCRIPT = """
import os, pkgutil, signal, sys
import numpy, scipy.stats, torch, torch.utils.data, cryptography.hazmat.primitives.ciphers
for name in {names!r}:
    for module in (os, signal):
        if hasattr(module, name):
            delattr(module, name)
for name in {modules!r}:
    sys.modules[name] = None

import dpflash
import dpflash.attn, dpflash.audit, dpflash.check, dpflash.integrations, dpflash.losses, dpflash.nn
import dpflash.packing, dpflash.patterns, dpflash.cli.train, dpflash.train, dpflash.release

def train(**options):
    model = torch.nn.Linear(4, 2)
    engine = dpflash.PrivacyEngine(**options)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    before = model.weight.detach().clone()
    for x, y in loader:
        engine.backward(dpflash.losses.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(before, model.weight) and engine.get_epsilon(1e-5) > 0
    engine.save_checkpoint("checkpoint")

train()
if sys.modules.get("fcntl", 1) is None:
    try:
        train(ledger="ledger")
    except ValueError as error:
        assert "leave ledger out" in str(error), error
    else:
        raise AssertionError("a ledger without locks")
else:
    train(ledger="ledger")
"""
OF_LINUX = ["sched_getaffinity", "sched_setaffinity", "fdatasync", "posix_fadvise", "memfd_create"]
OF_UNIX = [
    *("register_at_fork", "fork", "sysconf", "sysconf_names", "getuid", "geteuid", "getgid"),
    *("fchmod", "fchown", "chown", "pread", "pwrite", "killpg", "setsid", "getpgid", "uname"),
    *("getloadavg", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "mkfifo", "nice"),
    *("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "setitimer", "pthread_sigmask"),
]
SYSTEMS = {
    "macOS": (OF_LINUX, []),
    "Windows": (OF_LINUX + OF_UNIX, ["fcntl", "resource", "pwd", "grp", "termios"]),
}


@pytest.mark.cases(0)
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_library_imports_and_trains(system, tmp_path):
    names, modules = SYSTEMS[system]
    script = Path(tmp_path, "script.py")
    script.write_text(SCRIPT.format(names=names, modules=modules))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
