package simhttp

import (
	"encoding/json"
	"slices"
)

// schema is as much of a JSON schema as is needed to make up a value.
type schema struct {
	Type       json.RawMessage   `json:"type"`
	Enum       []json.RawMessage `json:"enum"`
	Const      json.RawMessage   `json:"const"`
	Properties json.RawMessage   `json:"properties"`
	Required   []string          `json:"required"`
	Items      json.RawMessage   `json:"items"`
	AnyOf      []json.RawMessage `json:"anyOf"`
	MinItems   int               `json:"minItems"`
	Minimum    *float64          `json:"minimum"`
}

// pickTool returns the function that the answer must call and made-up arguments for it, as a JSON object. Name is empty if the
// request does not oblige the model to call one.
func pickTool(tools, choice json.RawMessage, seed uint64) (name, args string) {
	var list []struct {
		Function struct {
			Name       string          `json:"name"`
			Parameters json.RawMessage `json:"parameters"`
		} `json:"function"`
	}
	if json.Unmarshal(tools, &list) != nil || len(list) == 0 {
		return "", ""
	}
	at := int(seed % uint64(len(list)))
	var mode string
	if json.Unmarshal(choice, &mode) == nil {
		if mode != "required" {
			return "", ""
		}
	} else {
		var named struct {
			Function struct {
				Name string `json:"name"`
			} `json:"function"`
		}
		if json.Unmarshal(choice, &named) != nil {
			return "", ""
		}
		at = -1
		for i := range list {
			if list[i].Function.Name == named.Function.Name {
				at = i
			}
		}
		if at < 0 {
			return "", ""
		}
	}
	f := list[at].Function
	value, ok := makeUp(f.Parameters, "value", 0).(map[string]any)
	if !ok {
		value = map[string]any{}
	}
	return f.Name, string(mustJSON(value))
}

// maxSchemaDepth ends schemas that go on for ever.
const maxSchemaDepth = 8

// makeUp returns a value that a schema allows, as far as it is understood.
func makeUp(raw json.RawMessage, name string, depth int) any {
	var s schema
	if len(raw) == 0 || depth > maxSchemaDepth || json.Unmarshal(raw, &s) != nil {
		return "simulated " + name
	}
	switch {
	case s.Const != nil:
		return s.Const
	case len(s.Enum) > 0:
		return s.Enum[0]
	case len(s.AnyOf) > 0:
		return makeUp(s.AnyOf[0], name, depth+1)
	}
	typ := ""
	if json.Unmarshal(s.Type, &typ) != nil {
		var types []string
		if json.Unmarshal(s.Type, &types) == nil && len(types) > 0 {
			typ = types[0]
		}
	}
	if typ == "" && s.Properties != nil {
		typ = "object"
	}
	switch typ {
	case "object":
		var properties map[string]json.RawMessage
		if json.Unmarshal(s.Properties, &properties) != nil {
			return map[string]any{}
		}
		out := map[string]any{}
		for key, sub := range properties {
			if len(s.Required) == 0 || slices.Contains(s.Required, key) {
				out[key] = makeUp(sub, key, depth+1)
			}
		}
		return out
	case "array":
		out := []any{}
		for range max(s.MinItems, 1) {
			out = append(out, makeUp(s.Items, name, depth+1))
		}
		return out
	case "integer", "number":
		if s.Minimum != nil {
			return *s.Minimum
		}
		return 1
	case "boolean":
		return true
	case "null":
		return nil
	}
	return "simulated " + name
}
