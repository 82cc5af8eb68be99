//! Types of tools' parameters.

use rustc_hash::FxHashMap;

/// What the value of a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterType {
    /// Text, as it stands.
    String,
    /// A JSON number without a fraction.
    Integer,
    /// A JSON number.
    Number,
    /// `true` or `false`.
    Boolean,
    /// A JSON object.
    Object,
    /// A JSON array.
    Array,
    /// `null`.
    Null,
    /// Not declared, or one of several.
    Any,
}

impl ParameterType {
    /// Every type with its name: those of JSON Schema, and `any`.
    pub const ALL: [(&'static str, Self); 8] = [
        ("string", Self::String),
        ("integer", Self::Integer),
        ("number", Self::Number),
        ("boolean", Self::Boolean),
        ("object", Self::Object),
        ("array", Self::Array),
        ("null", Self::Null),
        ("any", Self::Any),
    ];

    /// The type of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find_map(|(known, kind)| (known == name).then_some(kind))
    }
}

/// Function, parameter, type.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolTypes(FxHashMap<String, FxHashMap<String, ParameterType>>);

impl ToolTypes {
    /// Declares a parameter's type.
    pub fn insert(&mut self, function: String, parameter: String, kind: ParameterType) {
        self.0.entry(function).or_default().insert(parameter, kind);
    }

    /// A parameter's type; [`ParameterType::Any`] if it is not declared.
    pub fn get(&self, function: &str, parameter: &str) -> ParameterType {
        let parameters = self.0.get(function);
        let kind = parameters.and_then(|parameters| parameters.get(parameter));
        kind.copied().unwrap_or(ParameterType::Any)
    }
}
