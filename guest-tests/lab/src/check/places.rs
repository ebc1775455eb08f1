// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Describes the places of instructions in a kernel: function and offset, with file and line if the
//! kernel has debug information.

use std::{
    fmt,
    path::Path,
    sync::{Mutex, PoisonError},
};

use addr2line::Loader;

use super::symbols::SymbolTable;

/// Bytes of an instruction.
const INSTRUCTION: u64 = 4;

/// Function and file that determine the directory of the source tree in debug information.
const ROOT_FUNCTION: &str = "start_kernel";
const ROOT_FILE: &str = "init/main.c";

/// Symbols of a kernel.
#[derive(Debug, Default)]
pub struct Places {
    symbols: SymbolTable,
    lines: Option<Lines>,
}

impl Places {
    /// Returns the symbols of a `System.map`.
    pub fn of_system_map(text: &str) -> Self {
        Self { symbols: SymbolTable::parse(text), lines: None }
    }

    /// Adds the lines of a `vmlinux`. Without debug information, it has none.
    #[must_use]
    pub fn with_vmlinux(mut self, vmlinux: &Path) -> Self {
        self.lines = Lines::open(vmlinux, &self.symbols);
        self
    }

    pub const fn symbols(&self) -> &SymbolTable {
        &self.symbols
    }

    /// Describes the place of an instruction. A call may be the last instruction of its function, so
    /// a return address is the place of the call.
    pub fn describe(&self, address: u64, is_return_address: bool) -> Option<String> {
        let call = if is_return_address { address.wrapping_sub(INSTRUCTION) } else { address };
        let place = self.symbols.place(call)?;
        let mut text = format!("{}+{:#x}", place.function, place.offset + (address - call));
        if let Some(line) = self.lines.as_ref().and_then(|lines| lines.find(place.address)) {
            text += &format!(" {line}");
        }
        Some(text)
    }
}

/// Debug information of a kernel.
struct Lines {
    loader: Mutex<Loader>,
    /// Directory of the source tree, which does not belong into a report.
    root: String,
}

impl Lines {
    fn open(vmlinux: &Path, symbols: &SymbolTable) -> Option<Self> {
        let loader = Loader::new(vmlinux).ok()?;
        let start = symbols.range(ROOT_FUNCTION)?.start;
        let file = loader.find_location(start).ok().flatten()?.file?.to_owned();
        let root = file.strip_suffix(ROOT_FILE)?.to_owned();
        Some(Self { loader: Mutex::new(loader), root })
    }

    /// Returns file and line of an instruction.
    fn find(&self, address: u64) -> Option<String> {
        let loader = self.loader.lock().unwrap_or_else(PoisonError::into_inner);
        let location = loader.find_location(address).ok().flatten()?;
        let file = location.file?;
        let file = file.strip_prefix(&self.root).unwrap_or(file);
        Some(format!("{file}:{}", location.line?))
    }
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines").field("root", &self.root).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, process};

    use super::*;

    #[test]
    fn a_return_address_behind_a_function_belongs_to_it() {
        let places = Places::of_system_map("ffff800010001000 t caller\nffff800010001010 t next\n");

        let describe = |is_return| places.describe(0xffff_8000_1000_1010, is_return).unwrap();

        assert_eq!(describe(true), "caller+0x10");
        assert_eq!(describe(false), "next+0x0");
    }

    #[test]
    fn a_file_is_named_relative_to_the_source_tree() {
        let tree = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = tree.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            path
        };
        let vmlinux = tree.path().join("vmlinux");
        let compiled = process::Command::new("cc")
            .args(["-g", "-nostdlib", "-no-pie", "-static", "-Wl,-e,start_kernel", "-o"])
            .arg(&vmlinux)
            .arg(write(ROOT_FILE, "void start_kernel(void)\n{\n}\n"))
            .arg(write("virt/kvm.c", "\nvoid fault(void)\n{\n}\n"))
            .status();
        if !compiled.is_ok_and(|status| status.success()) {
            return granule_types::testing::skip("no C compiler");
        }
        let nm = process::Command::new("nm").arg(&vmlinux).output().unwrap().stdout;
        let map = String::from_utf8(nm).unwrap();
        let places = Places::of_system_map(&map).with_vmlinux(&vmlinux);

        let fault = places.symbols.range("fault").unwrap().start;
        let line = places.lines.as_ref().unwrap().find(fault);

        assert_eq!(line.unwrap(), "virt/kvm.c:3");
    }

    #[test]
    fn a_file_without_debug_information_has_no_lines() {
        let map = "ffff800010001000 T start_kernel\n";
        let program = std::env::current_exe().unwrap();

        for file in [program.as_path(), Path::new("/no/vmlinux")] {
            let places = Places::of_system_map(map).with_vmlinux(file);

            assert_eq!(places.describe(0xffff_8000_1000_1000, false).unwrap(), "start_kernel+0x0");
        }
    }
}
