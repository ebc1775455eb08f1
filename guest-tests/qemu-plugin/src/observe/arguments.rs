// SPDX-License-Identifier: GPL-2.0-or-later
//! Arguments of the trace.

use std::path::PathBuf;

use super::functions::{Function, Lock};
use crate::hexadecimal::hexadecimal;

/// A call that frees stage-2 tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeingCall {
    /// Virtual address of the function.
    pub address: u64,
    /// Bytes from its first argument to the virtual address of the root table.
    pub offset: u64,
}

/// An argument of a function that is reported as the word it points at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadedArgument {
    /// Number of the function.
    pub function: u16,
    /// The reported argument, counted from 0.
    pub argument: usize,
    /// The argument with the pointer, counted from 0.
    pub pointer: u8,
    /// Bytes from the pointer to the word.
    pub offset: u64,
}

/// Arguments of the trace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TraceArguments {
    /// Output file or FIFO; no trace without it.
    pub file: Option<PathBuf>,
    /// Functions whose calls are reported.
    pub functions: Vec<Function>,
    /// Words that are watched.
    pub locks: Vec<Lock>,
    /// Numbers of functions whose first argument and result are addresses, reported as physical ones.
    pub physical: Vec<u16>,
    /// Arguments that are loaded from memory.
    pub loads: Vec<LoadedArgument>,
    /// Calls that free tables.
    pub frees: Vec<FreeingCall>,
    /// Indicates that events name the thread of the hypervisor, whose number is in SP_EL0.
    pub has_threads: bool,
    /// Indicates that events have no call stacks.
    pub omits_stacks: bool,
    /// Indicates that the trace contains the kernel's own tables.
    pub watches_kernel: bool,
    /// Indicates that the copies of the tables are compared with memory at each mark and at the
    /// end.
    pub verifies: bool,
}

impl TraceArguments {
    /// Sets an argument; `None` if it is none of the trace, or malformed.
    pub fn set(&mut self, key: &str, value: &str) -> Option<()> {
        let mut parts = value.split(':');
        let mut part = || parts.next();
        match key {
            "trace" if !value.is_empty() => self.file = Some(PathBuf::from(value)),
            "function" => {
                let number = part()?.parse().ok()?;
                let (start, end) = (hexadecimal(part()?)?, hexadecimal(part()?)?);
                self.functions.push(Function { number, start, end, cold: Vec::new() });
            }
            "cold" => {
                let number: u16 = part()?.parse().ok()?;
                let range = hexadecimal(part()?)?..hexadecimal(part()?)?;
                let function = self.functions.iter_mut().find(|one| one.number == number)?;
                function.cold.push(range);
            }
            "lock" => {
                let function = part()?.parse().ok()?;
                self.locks.push(Lock { function, offset: hexadecimal(part()?)? });
            }
            "physical" => self.physical.push(part()?.parse().ok()?),
            "load" => {
                let function = part()?.parse().ok()?;
                let argument = part()?.parse().ok().filter(|number| *number < 4)?;
                let pointer = part()?.parse().ok().filter(|number| *number < 4)?;
                let offset = hexadecimal(part()?)?;
                self.loads.push(LoadedArgument { function, argument, pointer, offset });
            }
            "free" => {
                let address = hexadecimal(part()?)?;
                self.frees.push(FreeingCall { address, offset: hexadecimal(part()?)? });
            }
            "threads" if value == "on" => self.has_threads = true,
            "stacks" if value == "off" => self.omits_stacks = true,
            "stage1" if value == "on" => self.watches_kernel = true,
            "verify" if value == "on" => self.verifies = true,
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_parsed() {
        let mut arguments = TraceArguments::default();

        for (key, value) in [
            ("trace", "/tmp/t"),
            ("function", "3:ffff800010010000:ffff800010010100"),
            ("cold", "3:ffff800010090000:ffff800010090010"),
            ("lock", "3:1c"),
            ("physical", "3"),
            ("load", "3:2:1:b0"),
            ("free", "ffff800010020000:8"),
            ("threads", "on"),
            ("stacks", "off"),
            ("stage1", "on"),
            ("verify", "on"),
        ] {
            assert_eq!(arguments.set(key, value), Some(()), "{key}={value}");
        }

        let (start, end) = (0xffff_8000_1001_0000, 0xffff_8000_1001_0100);
        let cold = 0xffff_8000_1009_0000..0xffff_8000_1009_0010;
        let expected = TraceArguments {
            file: Some("/tmp/t".into()),
            functions: vec![Function { number: 3, start, end, cold: vec![cold] }],
            locks: vec![Lock { function: 3, offset: 0x1c }],
            physical: vec![3],
            loads: vec![LoadedArgument { function: 3, argument: 2, pointer: 1, offset: 0xb0 }],
            frees: vec![FreeingCall { address: 0xffff_8000_1002_0000, offset: 8 }],
            has_threads: true,
            omits_stacks: true,
            watches_kernel: true,
            verifies: true,
        };
        assert_eq!(arguments, expected);
    }

    #[test]
    fn malformed_values_are_refused() {
        for (key, value) in [
            ("trace", ""),
            ("function", "3:10"),
            ("function", "x:10:20"),
            ("cold", "3:10:20"),
            ("lock", "3"),
            ("physical", "x"),
            ("load", "3:4:1:0"),
            ("load", "3:1:4:0"),
            ("free", "10"),
            ("threads", "sp_el0"),
            ("stacks", "on"),
            ("stage1", "off"),
            ("verify", "1"),
            ("out", "x"),
        ] {
            assert_eq!(TraceArguments::default().set(key, value), None, "{key}={value}");
        }
    }
}
