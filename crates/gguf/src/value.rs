//! Metadata values: every type of the format, arrays of arrays included.

use std::borrow::Cow;
use std::fmt;
use std::str::Utf8Error;

/// A string as stored. The format does not guarantee UTF-8, so the bytes are kept.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct GgufString(Box<[u8]>);

impl GgufString {
    /// The bytes as they are.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The text, if it is valid UTF-8.
    ///
    /// # Errors
    /// The position of the first invalid byte.
    pub fn as_str(&self) -> Result<&str, Utf8Error> {
        std::str::from_utf8(&self.0)
    }

    /// Display name: control characters escaped, invalid bytes replaced.
    pub fn shown(&self) -> Cow<'_, str> {
        shown(&self.0)
    }
}

/// Bytes as text that is safe for a terminal or a log.
pub(crate) fn shown(bytes: &[u8]) -> Cow<'_, str> {
    let text = String::from_utf8_lossy(bytes);
    if text.chars().any(char::is_control) {
        text.escape_debug().to_string().into()
    } else {
        text
    }
}

impl From<&str> for GgufString {
    fn from(text: &str) -> GgufString {
        GgufString(text.as_bytes().into())
    }
}

impl From<&[u8]> for GgufString {
    fn from(bytes: &[u8]) -> GgufString {
        GgufString(bytes.into())
    }
}

impl fmt::Debug for GgufString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.shown())
    }
}

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    missing_docs,
    reason = "the variants are the format's types by their own names"
)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(GgufString),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array value. All elements have one type, which an empty array has too.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    missing_docs,
    reason = "the variants are the format's types by their own names"
)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<GgufString>),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// `(id, name)` of each type, which scalars and arrays share.
macro_rules! type_facts {
    ($self:ident, $Kind:ident) => {
        match $self {
            $Kind::U8(_) => (0, "u8"),
            $Kind::I8(_) => (1, "i8"),
            $Kind::U16(_) => (2, "u16"),
            $Kind::I16(_) => (3, "i16"),
            $Kind::U32(_) => (4, "u32"),
            $Kind::I32(_) => (5, "i32"),
            $Kind::F32(_) => (6, "f32"),
            $Kind::Bool(_) => (7, "bool"),
            $Kind::String(_) => (8, "string"),
            $Kind::Array(_) => (9, "array"),
            $Kind::U64(_) => (10, "u64"),
            $Kind::I64(_) => (11, "i64"),
            $Kind::F64(_) => (12, "f64"),
        }
    };
}

impl Value {
    pub(crate) fn type_id(&self) -> u32 {
        type_facts!(self, Value).0
    }

    /// The type's name in the format, such as `u32`; for arrays with element type and length.
    pub fn type_name(&self) -> String {
        match self {
            Value::Array(array) => format!("array of {} {}", array.len(), array.element_name()),
            other => type_facts!(other, Value).1.to_owned(),
        }
    }

    /// The value as a non-negative integer of any width.
    pub fn as_integer(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }
}

impl Array {
    pub(crate) fn element_id(&self) -> u32 {
        type_facts!(self, Array).0
    }

    /// The element type's name in the format.
    pub fn element_name(&self) -> &'static str {
        type_facts!(self, Array).1
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as non-negative integers, if all of them are.
    pub fn as_integers(&self) -> Option<Vec<u64>> {
        fn signed<T: Copy + TryInto<u64>>(v: &[T]) -> Option<Vec<u64>> {
            v.iter().map(|&x| x.try_into().ok()).collect()
        }
        match self {
            Array::U8(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::U16(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::U32(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::U64(v) => Some(v.clone()),
            Array::I8(v) => signed(v),
            Array::I16(v) => signed(v),
            Array::I32(v) => signed(v),
            Array::I64(v) => signed(v),
            _ => None,
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::String(text.into())
    }
}

/// Display form: one line, with long arrays truncated.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::String(v) => f.write_str(&v.shown()),
            Value::Array(v) => v.fmt(f),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
        }
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 6;
        fn list<T: fmt::Debug>(f: &mut fmt::Formatter<'_>, v: &[T]) -> fmt::Result {
            f.debug_list().entries(v.iter().take(SHOWN)).finish()?;
            if v.len() > SHOWN {
                write!(f, " … {} in all", v.len())
            } else {
                Ok(())
            }
        }
        match self {
            Array::U8(v) => list(f, v),
            Array::I8(v) => list(f, v),
            Array::U16(v) => list(f, v),
            Array::I16(v) => list(f, v),
            Array::U32(v) => list(f, v),
            Array::I32(v) => list(f, v),
            Array::F32(v) => list(f, v),
            Array::Bool(v) => list(f, v),
            Array::String(v) => list(f, v),
            Array::Array(v) => write!(f, "{} arrays", v.len()),
            Array::U64(v) => list(f, v),
            Array::I64(v) => list(f, v),
            Array::F64(v) => list(f, v),
        }
    }
}
