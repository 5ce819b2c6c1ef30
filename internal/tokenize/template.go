package tokenize

// loadTemplate compiles the chat template of a model. It returns nil and the reason where there is none that can be used.
func (m *Model) loadTemplate(src *source) (template, string) {
	if len(src.templates) == 0 {
		return nil, "the model has no chat template: name one with chat_template"
	}
	return nil, "chat templates are not supported yet"
}
