// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Settings of a kernel's build on the command line: configuration symbols and variables of `make`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::serialize_as_on_the_command_line;

/// Variable of `make` and its value: `LLVM=1`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct MakeVariable {
    /// Name of the variable.
    pub name: String,
    /// Value of the variable; may be empty.
    pub value: String,
}

impl FromStr for MakeVariable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const RESERVED: [&str; 4] = ["ARCH", "O", "KBUILD_OUTPUT", "CROSS_COMPILE"];
        let is_name = |name: &str| {
            name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
                && name.starts_with(|first: char| first.is_ascii_alphabetic())
        };
        match text.split_once('=') {
            Some((name, _)) if RESERVED.contains(&name) => {
                Err(format!("the lab sets {name} itself"))
            }
            Some((name, value)) if is_name(name) => {
                Ok(Self { name: name.to_owned(), value: value.to_owned() })
            }
            _ => Err("expected VARIABLE=VALUE, such as LLVM=1 or KCFLAGS=-fno-inline".to_owned()),
        }
    }
}

impl fmt::Display for MakeVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

/// Setting of a build: a configuration symbol or a variable of `make`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum BuildSetting {
    /// Line of a configuration fragment.
    Config(String),
    /// Variable of `make`.
    Make(MakeVariable),
}

impl FromStr for BuildSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.starts_with("CONFIG_") {
            return text.parse().map(Self::Make);
        }
        match text.split_once('=') {
            Some((symbol, "n")) => Ok(Self::Config(format!("# {symbol} is not set"))),
            Some((_, value)) if !value.is_empty() => Ok(Self::Config(text.to_owned())),
            _ => Err("expected CONFIG_SYMBOL=VALUE, such as CONFIG_PREEMPT=y".to_owned()),
        }
    }
}

impl fmt::Display for BuildSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unset = |line: &str| {
            Some(line.strip_prefix("# ")?.strip_suffix(" is not set")?.to_owned() + "=n")
        };
        match self {
            Self::Config(line) => f.write_str(&unset(line).unwrap_or_else(|| line.clone())),
            Self::Make(variable) => variable.fmt(f),
        }
    }
}

serialize_as_on_the_command_line!(MakeVariable, BuildSetting);

/// Parses a setting of `--variant`; the text names the kernel.
pub fn parse_variant(text: &str) -> Result<(String, BuildSetting), String> {
    Ok((text.to_owned(), text.parse()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_make_variable_has_a_name_that_the_lab_does_not_set() {
        let llvm: MakeVariable = "LLVM=1".parse().unwrap();

        assert_eq!(llvm, MakeVariable { name: "LLVM".to_owned(), value: "1".to_owned() });
        for text in ["LLVM", "=1", "ARCH=x86", "a b=1"] {
            assert!(text.parse::<MakeVariable>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_setting_is_a_symbol_or_a_variable() {
        let setting = |text: &str| text.parse::<BuildSetting>();

        assert_eq!(
            setting("CONFIG_SMP=n"),
            Ok(BuildSetting::Config("# CONFIG_SMP is not set".into()))
        );
        assert!(matches!(setting("LLVM=1"), Ok(BuildSetting::Make(_))));
        assert!(setting("CONFIG_SMP").is_err() && setting("x").is_err());
    }
}
