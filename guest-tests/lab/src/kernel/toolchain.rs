// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The compiler of a kernel build, and the `make` variables that select it.
//!
//! `LLVM=1` selects clang and its linker, as in the kernel's own build; without it, gcc compiles,
//! by the cross compiler of Debian's name unless this machine is arm64 and has none. If `ccache` is
//! installed, compilers run under it, which has no effect on the results.

use std::{env, path::Path};

use crate::{
    command::{Command, CommandError},
    shell::Shell,
    values::MakeVariable,
};

/// Prefix of the cross compiler, and of Debian's native compiler.
const CROSS_COMPILE: &str = "aarch64-linux-gnu-";

/// Compiler of a build, identified by the version of its programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Toolchain {
    /// First lines of the compiler's and the linker's `--version`.
    pub version: String,
    arguments: Vec<String>,
}

impl Toolchain {
    /// Returns the toolchain that variables of `make` select; of equal names, the last one counts.
    pub fn new(shell: Shell, variables: &[MakeVariable]) -> Result<Self, CommandError> {
        let value = |name: &str| {
            let mut last = variables.iter().rev();
            last.find(|variable| variable.name == name).map(|variable| variable.value.as_str())
        };
        let prefix = cross_compile_prefix();
        // `LLVM=-15` selects clang-15, `LLVM=/usr/lib/llvm-15/bin/` that directory.
        let llvm = value("LLVM").filter(|value| !value.is_empty());
        let tool = |name: &str, gnu: &str| match llvm {
            Some(suffix) if suffix.starts_with('-') => format!("{name}{suffix}"),
            Some(directory) if directory.ends_with('/') => format!("{directory}{name}"),
            Some(_) => name.to_owned(),
            None => format!("{prefix}{gnu}"),
        };
        let compiler = value("CC").map_or_else(|| tool("clang", "gcc"), str::to_owned);
        let linker = value("LD").map_or_else(|| tool("ld.lld", "ld"), str::to_owned);
        let mut version = Vec::new();
        for program in [&compiler, &linker] {
            let mut words = program.split_ascii_whitespace();
            let query = Command::new("querying the compiler", words.next().unwrap_or_default())
                .args(words)
                .arg("--version")
                .query();
            match query {
                Err(_) if shell.is_dry_run() => {}
                text => version.extend(text?.lines().next().map(str::to_owned)),
            }
        }
        let mut arguments = vec!["ARCH=arm64".to_owned(), format!("CROSS_COMPILE={prefix}")];
        arguments
            .extend(variables.iter().map(|MakeVariable { name, value }| format!("{name}={value}")));
        if value("CC").is_none() && is_installed("ccache") {
            arguments.push(format!("CC=ccache {compiler}"));
        }
        Ok(Self { version: version.join(", "), arguments })
    }

    /// Returns the `make` command for an arm64 kernel tree. Build properties in the image that vary
    /// between machines have fixed values.
    pub fn make(&self, task: &str, tree: &Path) -> Command {
        Command::new(task, "make")
            .env("KBUILD_BUILD_TIMESTAMP", "2000-01-01")
            .env("KBUILD_BUILD_USER", "granule")
            .env("KBUILD_BUILD_HOST", "lab")
            .env("KBUILD_BUILD_VERSION", "1")
            .env("LOCALVERSION", "")
            .args(["-s", "-C"])
            .arg(tree)
            .args(&self.arguments)
    }
}

/// Returns the prefix of the programs for arm64.
fn cross_compile_prefix() -> &'static str {
    let is_native = cfg!(target_arch = "aarch64");
    if is_native && !is_installed(&format!("{CROSS_COMPILE}gcc")) { "" } else { CROSS_COMPILE }
}

fn is_installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Returns the number of parallel compilers: one for each CPU.
pub fn parallel_jobs() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_selected_compiler() {
        let variables = ["CC=echo one", "LD=echo two"].map(|text| text.parse().unwrap());

        let toolchain = Toolchain::new(Shell::new(false), &variables).unwrap();

        assert_eq!(toolchain.version, "one --version, two --version");
        let make = toolchain.make("x", Path::new("/t")).to_string();
        assert!(make.contains("ARCH=arm64") && make.contains("'CC=echo one'"), "{make}");
    }

    #[test]
    fn a_missing_compiler_is_an_error_except_in_a_dry_run() {
        let variables = ["CC=no-such-compiler".parse().unwrap()];

        assert!(Toolchain::new(Shell::new(false), &variables).is_err());
        assert!(Toolchain::new(Shell::new(true), &variables).is_ok());
    }
}
