// SPDX-License-Identifier: GPL-2.0-or-later
//! Programs without an operating system, for QEMU's virt machine with EL2.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Prefix of the tools for arm64.
const TOOL_PREFIX: &str = if cfg!(target_arch = "aarch64") { "" } else { "aarch64-linux-gnu-" };

/// Returns the plugin's release build.
pub fn plugin_path() -> PathBuf {
    let built = env::current_exe().unwrap();
    let target = built.ancestors().nth(3).unwrap();
    let plugin = target.join("release/libgranule_qemu_plugin.so");
    assert!(plugin.is_file(), "build the plugin first: {} is missing", plugin.display());
    plugin
}

/// Builds the program `NAME.S` of this folder as a raw image in a directory.
pub fn build(name: &str, defines: &[String], directory: &Path) -> PathBuf {
    let path = |name: &str| directory.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    run_successfully(
        Command::new(format!("{TOOL_PREFIX}gcc"))
            .args(["-nostdlib", "-static", "-Wl,-Ttext=0x40080000", "-Wl,--build-id=none"])
            .args(defines)
            .arg("-o")
            .args([path("program.elf"), source]),
    );
    run_successfully(
        Command::new(format!("{TOOL_PREFIX}objcopy"))
            .args(["-O", "binary"])
            .args([path("program.elf"), path("program")]),
    );
    path("program")
}

/// Returns the command of the emulator with a program, CPUs and arguments of the plugin.
pub fn emulator(program: &Path, cpus: u64, arguments: &str) -> Command {
    let emulator = env::var("GRANULE_QEMU").unwrap_or_else(|_| "qemu-system-aarch64".to_owned());
    let mut command = Command::new(emulator);
    command
        .args(["-M", "virt,virtualization=on,gic-version=2", "-cpu", "max", "-m", "128M"])
        .args(["-smp", &cpus.to_string(), "-icount", "shift=0,sleep=off"])
        .args(["-nic", "none", "-display", "none", "-monitor", "none", "-serial", "none"])
        .arg("-kernel")
        .arg(program)
        .arg("-plugin")
        .arg(format!("file={},{arguments}", plugin_path().display()));
    command
}

/// Runs a command that must succeed.
pub fn run_successfully(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}
